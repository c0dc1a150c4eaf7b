"""Usage reports for operators: rows are read from Redis, filtered, summed, priced and rendered."""
