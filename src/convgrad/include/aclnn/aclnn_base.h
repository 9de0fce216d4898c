/* The types of operator calls. */
#include "aclnn/acl_meta.h"
