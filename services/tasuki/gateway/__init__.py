"""The policy behind the HTTP interfaces that agents speak."""
