"""Every message that crosses a process border: network schema, pipe structs, config, errors, codec."""
