"""Several engines of one base model behind one interface: connections, news, routing, and moves of requests between
them."""
