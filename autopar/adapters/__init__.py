"""The files that may use private names of torch. Nothing else imports them."""
