"""Usage as operators read it: rows from Redis, filtered, summed, priced and written down."""
