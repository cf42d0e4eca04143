/* The grammar of requests, and the tail of the VMM's output. */
#include "shim.h"

#include <string.h>

static bool word(const char **at, const char *end, char *out, size_t room)
{
	size_t used = 0;
	while (*at < end && **at >= 'a' && **at <= 'z') {
		if (used + 1 == room)
			return false;
		out[used++] = *(*at)++;
	}
	out[used] = 0;
	return used > 0;
}

/* verb [key=decimal] */
bool request_parse(const char *text, size_t length, struct request *request)
{
	const char *at = text, *end = text + length;
	memset(request, 0, sizeof *request);
	if (!word(&at, end, request->verb, sizeof request->verb))
		return false;
	if (at == end)
		return true;
	if (*at++ != ' ' || !word(&at, end, request->key, sizeof request->key) || at == end || *at++ != '=' || at == end)
		return false;
	for (; at < end; at++) {
		if (*at < '0' || *at > '9' || request->value > 100000000)
			return false;
		request->value = request->value * 10 + (unsigned)(*at - '0');
	}
	request->has_value = true;
	return true;
}

void tail_add(struct tail *tail, const char *data, size_t length)
{
	tail->total += length;
	if (length > LOG_BYTES) {
		data += length - LOG_BYTES;
		length = LOG_BYTES;
	}
	for (size_t i = 0; i < length; i++) {
		tail->bytes[(tail->start + tail->used) % LOG_BYTES] = data[i];
		if (tail->used < LOG_BYTES)
			tail->used++;
		else
			tail->start = (tail->start + 1) % LOG_BYTES;
	}
}

size_t tail_copy(const struct tail *tail, char *out)
{
	for (size_t i = 0; i < tail->used; i++)
		out[i] = tail->bytes[(tail->start + i) % LOG_BYTES];
	return tail->used;
}
