"""What an engine process keeps on its machine: files, locks, its pulse, its log and the models it finds."""
