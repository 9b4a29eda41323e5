"""The version of this package; pyproject.toml states the same (a test compares), and the native library must match."""

__version__ = "0.1.0"
