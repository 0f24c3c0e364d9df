// Package jointoken is the built-in attestor: a machine that brings a join token
// may enter the token's tenant and pool. The token is a bearer secret; what the
// machine claims of itself guards against mistakes, not thieves.
package jointoken
