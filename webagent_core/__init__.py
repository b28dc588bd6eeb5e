"""What a web-agent training method is made of, whatever trains it. Imports neither verl, trl nor ray."""
