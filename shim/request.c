/* The grammar of requests and of the paths that mean descriptors, and the tail of the VMM's output. */
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

int file_number(const char *text, size_t length)
{
	static const char folder[] = "/hatchway/";
	size_t at = sizeof folder - 1;
	int value = 0;
	if (memchr(text, 0, length) == NULL || strncmp(text, folder, at) != 0 || text[at] < '1' || text[at] > '9')
		return -1;
	for (; text[at] >= '0' && text[at] <= '9' && value <= MAX_TARGET_FD; at++)
		value = value * 10 + (text[at] - '0');
	return text[at] == 0 && value <= MAX_TARGET_FD ? value : -1;
}

void tail_add(struct tail *tail, const char *data, size_t length)
{
	tail->total += length;
	if (length > tail->room) {
		data += length - tail->room;
		length = tail->room;
	}
	for (size_t i = 0; i < length; i++) {
		tail->bytes[(tail->start + tail->used) % tail->room] = data[i];
		if (tail->used < tail->room)
			tail->used++;
		else
			tail->start = (tail->start + 1) % tail->room;
	}
}

size_t tail_copy(const struct tail *tail, char *out)
{
	for (size_t i = 0; i < tail->used; i++)
		out[i] = tail->bytes[(tail->start + i) % tail->room];
	return tail->used;
}
