"""What every template and every loss is made of: the record of a template, the declaration of a loss, options, and modules."""
