"""A stand-in for the Hugging Face Hub: its API, for the real client, over a few MiB of deterministic files."""
