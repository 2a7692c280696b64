"""Messages of other engines and gateways, which their clients speak with us."""
