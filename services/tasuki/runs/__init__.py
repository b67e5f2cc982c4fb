"""A training run: its inputs, folder and loop, and how it resumes."""
