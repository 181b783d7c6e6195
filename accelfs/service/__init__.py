"""What does an operator administer?  The node's folders; instances, slots and tenants come on top of them."""
