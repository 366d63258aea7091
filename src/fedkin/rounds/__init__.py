"""What a run is: its records, how it is put together, and the loop over its rounds."""
