"""Ray actors: thin shells round library objects, one file each."""
