// Package keyring holds the keys of a replica that are not a CA's: those that sign
// answers, those that machines seal to, and those that seal what goes through a
// machine's hands between two rounds. They come from Secrets that the keys job
// makes and rotates, and change while the process runs.
package keyring
