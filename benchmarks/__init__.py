"""How fast the project is, measured on test hosts; see README.md."""
