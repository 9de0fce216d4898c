/* Start and end of a program, and everything around an operator call. */
#ifndef CONVGRAD_ACL_H
#define CONVGRAD_ACL_H

#include "acl/acl_base.h"
#include "acl/acl_rt.h"
#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Starts the process that computes; configPath is accepted and not read. */
aclError aclInit(const char* configPath);
aclError aclFinalize(void);

#ifdef __cplusplus
}
#endif

#endif
