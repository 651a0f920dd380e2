"""Making the stand-in images from Debian packages and Python wheels: no registry, no container engine."""
