"""The engine core: one plain loop that schedules, executes, samples and updates."""
