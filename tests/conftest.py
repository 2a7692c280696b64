"""What tests need of the process they run in."""

import os
import signal

# A shell's background jobs ignore it, and so would everything that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports Triton (transformers does): its kernels run in its interpreter, on tensors of the CPU.
os.environ["TRITON_INTERPRET"] = "1"
