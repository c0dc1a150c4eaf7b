"""Files of tenants: contents in a storage, records and charges in Redis. Other packages use `service.Files`."""
