"""`tasuki doctor`: judges a machine and a configuration."""
