"""Several engines of one base model behind one interface: connections, the engines' periodic load reports (news),
routing, and moves of requests between engines."""
