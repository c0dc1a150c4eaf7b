"""Rules of the gateway without input and output: errors, limits, lanes, tenants, prices and addresses."""
