"""`tasuki doctor`: checks a machine and a configuration."""
