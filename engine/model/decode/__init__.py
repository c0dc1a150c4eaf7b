"""The decoder of all families: how it is assembled from weights, and computed, also over stages. Imports `memory`,
`batch`, `layers`, `ranks` and what is below."""
