"""GGUF files: container, block formats, and the model that the metadata describes."""
