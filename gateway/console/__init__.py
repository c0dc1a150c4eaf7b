"""The console's page: HTML, CSS and plain modules, as browsers read them."""
