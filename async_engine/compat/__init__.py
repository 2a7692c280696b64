"""Services of other engines and gateways over the same AsyncLLM, so that their clients can have us for a worker.

One adapter per file: their messages to our structs, our events to their messages, nothing else.
"""
