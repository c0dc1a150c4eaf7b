"""Memory of device and host: the arena of pages, copies between both, and packed adapters in host memory. Imports
`layers`, which says how large an adapter is, and `spec`."""
