"""Settings and devices for traffic, with the measurements and simulations that choose them."""
