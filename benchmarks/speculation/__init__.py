"""What drafting with the MTP layer gives, served."""
