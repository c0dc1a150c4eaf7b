"""Registries of named records in Redis, which every gateway follows. Each change is one script call and one log
entry."""
