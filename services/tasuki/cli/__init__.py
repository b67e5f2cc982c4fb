"""The `tasuki` command."""
