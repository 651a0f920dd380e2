"""The commands a stand-in image has."""
