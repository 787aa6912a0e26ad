/// Symbol visibility: everything is hidden except what carries OXY_API.
#pragma once

#define OXY_API __attribute__((visibility("default")))
