"""Where and how many: launching, settings, Serve config files."""
