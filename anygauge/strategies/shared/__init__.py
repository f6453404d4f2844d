"""Parts that engines share; a strategy of another distribution may import all of them."""
