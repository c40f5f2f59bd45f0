"""Learning to decide: what decisions are worth, and (later) the controllers that make them."""
