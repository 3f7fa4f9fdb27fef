"""Programs that show Medley at work. Nothing here is served or imported by the service."""
