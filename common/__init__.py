"""What all chapters share and the guide does not teach line by line."""
