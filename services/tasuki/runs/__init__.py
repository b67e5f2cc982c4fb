"""A training run: its inputs, its folder, its loop, and how it goes on after a break."""
