"""What tests need of the process they run in."""

import signal

# A shell's background jobs ignore it, and so would everything that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
