"""Before torch: threads that wait must not spin on the cores that other tests and processes need."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
