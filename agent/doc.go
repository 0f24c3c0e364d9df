// Package agent is a machine's side of the join: it keeps one key and one
// request, brings its attestor's evidence, and goes on asking until a signed
// answer says that it has joined. From then on it renews its certificate in time,
// each time with one more key and request that are stored before they are sent.
//
// It believes what the bundle that it pinned vouches for and nothing else. Every
// answer must be a signature by a pinned key over this machine's own request;
// whatever is not signed is a reason to wait, never a result. A crash at any
// point is followed by the same question with the same key and request, and the
// service answers that one as it did before.
package agent
