"""Files of tenants: bytes in a storage, records and charges in Redis. service.Files is the door."""
