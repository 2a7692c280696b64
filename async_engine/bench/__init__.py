"""`tailrace bench`: what a server can do, and what the control plane costs."""
