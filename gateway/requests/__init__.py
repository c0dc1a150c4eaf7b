"""The path of a request, the same for every protocol: admission, generation, deadlines and its record."""
