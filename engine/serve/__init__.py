"""Programs that contain an engine: its own process, a thread of another program, and what explains or measures one."""
