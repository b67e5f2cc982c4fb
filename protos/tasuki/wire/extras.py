"""The command that installs optional packages of tasuki."""


def install_extras(*extras: str) -> str:
    """Tells how to install extras. tasuki is on no package index, so it is installed from its checkout."""
    return f"pip install '.[{','.join(extras)}]' in tasuki's checkout"
