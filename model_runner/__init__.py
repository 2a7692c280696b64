"""One device: a step in, tokens out."""
